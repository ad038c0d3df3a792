"""The asyncio SDK for the electronic signing service."""
