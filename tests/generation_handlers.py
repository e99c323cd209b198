"""Handlers that generate, for tests."""

import os

from gpuworker.generation.handler import GenerationHandler


class Deadly(GenerationHandler):
    """A prompt with TOKEN ends its owner, like a bug in a kernel would."""

    TOKEN = 77

    def prepare(self):
        super().prepare()
        model = self._engine._model
        forward = model.forward

        def dies(chunks):
            if any(self.TOKEN in chunk.sequence.prompt for chunk in chunks):
                os._exit(13)
            return forward(chunks)

        model.forward = dies
