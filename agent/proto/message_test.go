package proto

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
)

func TestText(t *testing.T) {
	tests := []struct {
		text Text
		json string
	}{
		{"", `""`},
		{"plain \"quoted\"\n", `"plain \"quoted\"\n"`},
		{"grün", `"grün"`},
		{"\xff\xfe", `{"base64":"//4="}`},
		{"\uFFFD", `"` + "\uFFFD" + `"`},
		{"cut \xe2\x82", `{"base64":"Y3V0IOKC"}`},
	}
	for _, tt := range tests {
		b, err := json.Marshal(tt.text)
		if err != nil || string(b) != tt.json {
			t.Errorf("%q encodes as %s, %v, want %s", string(tt.text), b, err, tt.json)
		}
		var back Text
		if err := json.Unmarshal(b, &back); err != nil || back != tt.text {
			t.Errorf("%s decodes as %q, %v", b, string(back), err)
		}
	}
	for _, bad := range []string{`1`, `{}`, `{"base64":"*"}`, `null`, `["a"]`} {
		var v []Text
		if err := json.Unmarshal([]byte("["+bad+"]"), &v); err == nil {
			t.Errorf("%s decodes as %q, want an error", bad, v)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add("a\xffb")
	f.Fuzz(func(t *testing.T, s string) {
		b, err := json.Marshal(Text(s))
		if err != nil {
			t.Fatal(err)
		}
		var back Text
		if err := json.Unmarshal(b, &back); err != nil || string(back) != s {
			t.Fatalf("%q came back as %q, %v", s, string(back), err)
		}
	})
}

func TestVersions(t *testing.T) {
	tests := []struct {
		min, max, lowest, highest int
		want                      int
		ok                        bool
	}{
		{1, 1, 1, 1, 1, true},
		{1, 3, 2, 5, 3, true},
		{2, 9, 1, 4, 4, true},
		{1, 1, 2, 3, 1, false},
		{4, 5, 1, 3, 3, false},
	}
	for _, tt := range tests {
		v, ok := Hello{Min: tt.min, Max: tt.max}.Common(tt.lowest, tt.highest)
		if v != tt.want || ok != tt.ok {
			t.Errorf("%+v: got %d, %v", tt, v, ok)
		}
	}
	for _, h := range []Hello{{}, {Protocol: "http", Min: 1, Max: 1}, {Protocol: Name, Min: 0, Max: 1}, {Protocol: Name, Min: 2, Max: 1}} {
		if h.Check() == nil {
			t.Errorf("%+v passes the check", h)
		}
	}
}

func TestErrorsCompareByCode(t *testing.T) {
	err := fmt.Errorf("exec in guest: %w", &Error{Code: CodeNoSpace, Message: "disk full"})
	if !errors.Is(err, &Error{Code: CodeNoSpace}) || errors.Is(err, &Error{Code: CodeIO}) {
		t.Error("errors.Is does not compare codes")
	}
}
