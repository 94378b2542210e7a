"""HTTP in, HTTP out. JSON and asyncio stop here."""
