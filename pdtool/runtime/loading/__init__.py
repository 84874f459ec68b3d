"""Loading minibatches ahead of the first stage."""
