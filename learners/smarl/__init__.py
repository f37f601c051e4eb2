"""The mathematics of SMARL: stacked DDPG agents, soft updates, the target network and its memory."""
