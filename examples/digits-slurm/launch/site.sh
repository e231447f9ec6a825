# shellcheck shell=bash
# What generic-slurm needs before Python starts. Sourced by the launch scripts, after common.sh.

prepare_site() { # prepare_site NODES
  # Facts of generic-slurm, verified on 2026-11-27: ddp-scaffold presets show generic-slurm
  true
}
