"""How far what was predicted of a worker's cache came true."""


class Truth:
    """Prompt tokens that were predicted to be cached, beside those that the engine then found."""

    def __init__(self) -> None:
        self.n_requests = 0
        self.predicted_tokens = 0
        self.engine_cached_tokens = 0
        self.abs_error_tokens = 0  # summed over the requests, so that errors do not cancel out

    def add(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Count one prompt."""
        self.n_requests += 1
        self.predicted_tokens += predicted_tokens
        self.engine_cached_tokens += cached_tokens
        self.abs_error_tokens += abs(predicted_tokens - cached_tokens)
