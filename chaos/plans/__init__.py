"""Plans that come with lastgood: `lastgood chaos run NAME`."""
