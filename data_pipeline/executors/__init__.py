"""Run tasks in this process, in local processes, on Ray or on Slurm, with retries."""
