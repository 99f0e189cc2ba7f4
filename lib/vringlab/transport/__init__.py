"""Ways to reach a machine: SSH, and processes of this machine."""
