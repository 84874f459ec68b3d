"""Weight versions, their updates, and what replicas and tied stages share."""
