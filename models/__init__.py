"""Hand-written model code and its loading. Every forward pass is a coroutine that awaits a gate after each operator."""
