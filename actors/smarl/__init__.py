"""The Ray actors of SMARL: environment runners, DDPG workers and the coordinator."""
