"""Pages between engines: page server and client, the line between leaders, transports."""
