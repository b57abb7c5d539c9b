"""File formats: every readable format is a `Source`, every writable one a `Sink`."""
