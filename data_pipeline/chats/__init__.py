"""Read chats from JSON lines, and encode them with a chat template."""
