package snapshot

import "fmt"

// MaxName is the longest name of a snapshot, image or task, in bytes.
const MaxName = 128

// CheckName reports whether name may name a snapshot or an image: 1 to 128
// bytes of [a-zA-Z0-9._-], starting with a letter or a digit, so that it is
// one path element, never hidden and never looks like a flag.
func CheckName(name string) error {
	if name == "" || len(name) > MaxName {
		return fmt.Errorf("%w: name of %d bytes, 1 to %d are allowed", ErrInvalid, len(name), MaxName)
	}
	if c := name[0]; c == '.' || c == '-' || c == '_' {
		return fmt.Errorf("%w: name starts with %q", ErrInvalid, c)
	}
	for i := range len(name) {
		if !isWord(name[i]) {
			return fmt.Errorf("%w: byte %#02x in a name, allowed are letters, digits, '.', '_' and '-'", ErrInvalid, name[i])
		}
	}
	return nil
}

func isWord(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
}

// isID reports whether s is 16 bytes in lower-case hex.
func isID(s string) bool { return len(s) == 32 && isHex(s) }

func isHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
