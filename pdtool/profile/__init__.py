"""What each operator costs: measured on this machine."""
