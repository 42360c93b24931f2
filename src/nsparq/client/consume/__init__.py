"""The parts of a consumer: discovery, RDY, messages in flight, workers, dead letters."""
