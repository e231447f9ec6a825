"""ddp-scaffold: generates hardened PyTorch DDP training projects and keeps them up to date."""

__version__ = "0.10.0"
