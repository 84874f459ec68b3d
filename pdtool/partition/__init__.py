"""From a profile and a cluster to a plan: cost says what one takes, space which there are, search finds the best."""
