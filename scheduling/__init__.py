"""Scheduling policies: pure Python, no torch, no asyncio, no clock. Imports nothing else of the project."""
