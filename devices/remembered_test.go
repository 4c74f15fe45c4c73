package devices

import (
	"errors"
	"testing"
)

func TestRemembered(t *testing.T) {
	decoded := 0
	decode := func(data []byte) (string, error) {
		decoded++
		if len(data) == 0 {
			return "", errors.New("empty")
		}
		return string(data), nil
	}
	var r Remembered[string]
	for i, c := range []struct {
		data    string
		decoded int
		bad     bool
	}{{"", 1, true}, {"a", 2, false}, {"a", 2, false}, {"", 3, true}, {"a", 3, false}, {"b", 4, false}, {"a", 5, false}} {
		got, err := r.Decode([]byte(c.data), decode)
		if got != c.data || (err != nil) != c.bad || decoded != c.decoded {
			t.Errorf("call %d: %q (%v), decoded %d times, want %d", i, got, err, decoded, c.decoded)
		}
	}
}
