"""The systems that move bytes, each behind the same two ends: see `peers_app.movers.base`."""
