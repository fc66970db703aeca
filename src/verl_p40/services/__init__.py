"""What a container of ours starts: its folders are tried first, then the command takes its place."""
