"""A record of any layout becomes a `Conversation`: conversation.py begins; messages.py reads one message."""
