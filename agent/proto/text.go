package proto

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"unicode/utf8"
)

// Text is a string of arbitrary bytes: an argument, a path, an environment
// entry. Linux knows no encoding for these, JSON insists on one. Valid UTF-8
// travels as a JSON string, anything else as {"base64":"…"}.
type Text string

// MarshalJSON implements json.Marshaler.
func (t Text) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(t)) {
		return json.Marshal(string(t))
	}
	return json.Marshal(struct {
		Base64 string `json:"base64"`
	}{base64.StdEncoding.EncodeToString([]byte(t))})
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Text) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = Text(s)
		return nil
	}
	var v struct {
		Base64 *string `json:"base64"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	if v.Base64 == nil {
		return errors.New("neither a string nor an object with base64")
	}
	raw, err := base64.StdEncoding.DecodeString(*v.Base64)
	if err != nil {
		return err
	}
	*t = Text(raw)
	return nil
}

// Texts converts strings for a message.
func Texts(s []string) []Text {
	if s == nil {
		return nil
	}
	t := make([]Text, len(s))
	for i := range s {
		t[i] = Text(s[i])
	}
	return t
}

// Strings converts them back.
func Strings(t []Text) []string {
	s := make([]string, len(t))
	for i := range t {
		s[i] = string(t[i])
	}
	return s
}
