"""A run as a SLURM job: what the scripts of launch/ call. Without SLURM nothing here is used."""
