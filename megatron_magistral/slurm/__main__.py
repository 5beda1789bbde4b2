from megatron_magistral.slurm.cli import app

app()
