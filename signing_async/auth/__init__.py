"""OAuth 2.0 tokens: obtain, refresh, store, encrypt."""
