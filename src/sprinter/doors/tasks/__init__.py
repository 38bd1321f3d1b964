"""Tasks of lm-evaluation-harness over files: a YAML file each, and what reads the files."""
