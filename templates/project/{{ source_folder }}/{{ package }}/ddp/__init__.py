"""The plumbing of distributed training. Owned by the template: `copier update` brings fixes to these files."""
