"""Minibatches of the user's dataset, loaded ahead of the first stage.

Other folders use `minibatches`, `minibatch_loader` and `minibatch_source`.
"""
