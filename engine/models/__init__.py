"""Models: one decoder, and how its weights come in and go out."""
