"""Control of a running run: requests, administration, status, and its automatic stop."""
