"""What each operator of a model costs, measured on this machine or estimated for another device; and the network."""
