"""One API call: transport, retries, rate limit, decoding, error responses."""
