"""What a rank knows of itself: where it is, which collectives it has asked for, how fast it is, what it trains."""
