"""The core: from a prompt or a chat to typed events of the answer, the same for every protocol."""
