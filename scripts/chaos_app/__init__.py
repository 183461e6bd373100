"""Real daemons and engines under load, killed, stopped, cut off and lied to: nothing may leak or be corrupted."""
