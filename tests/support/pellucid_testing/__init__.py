"""What tests share: tiny models made on the spot, and a real server to talk to."""
