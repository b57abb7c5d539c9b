"""Other people's files: each that can be read is a `Source`, each that can be written a `Sink`."""
