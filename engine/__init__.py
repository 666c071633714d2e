"""The asyncio runtime: gate, executor, instances, proxy, engine, timeline."""
