"""Shell, sbatch, PBS and environment files: a tolerant reader that runs nothing, and the rules on what it reads."""
