"""Low-precision computation: autocast of a user's forward, and fp8 matrix products."""
