"""What several test files share: fakes and harnesses, imported as `headway_testing`."""
