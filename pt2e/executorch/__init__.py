"""ExecuTorch files: programs that run on phones and other devices."""
