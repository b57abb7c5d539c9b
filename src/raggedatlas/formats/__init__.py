"""File formats: each readable format is a `Source`, each writable one a `Sink`."""
