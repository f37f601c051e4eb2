# shellcheck shell=sh
# Login shells set PATH anew: this brings `greenroom`, `ray` and their Python back into it.
PATH=/home/greenroom/venv/bin:$PATH
export PATH
