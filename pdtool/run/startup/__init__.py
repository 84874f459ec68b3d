"""What a worker builds of the model before it trains."""
