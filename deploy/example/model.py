"""A handler to begin with: put your model in its place."""


class Upper:
    """Answers each text in capitals."""

    def load(self) -> None:
        """Here the model is loaded; this runs in the owner only."""

    def run_batch(self, texts: list[str]) -> list[str]:
        """One answer for each request of the batch."""
        return [text.upper() for text in texts]
