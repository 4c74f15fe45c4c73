package judge

import (
	"bytes"
	"math"
	"strings"
	"testing"
)

func TestRewardJSON(t *testing.T) {
	for text, want := range map[string]Reason{
		`{"reward":1}`: "", ` {"reward" : 0.5e0 , "b":-7} `: "", `{"reward":0}`: "",
		``: ReasonEmpty, "\n": ReasonEmpty,
		`{"reward":NaN}`: ReasonMalformed, `{"reward":"1"}`: ReasonMalformed, `{"reward":true}`: ReasonMalformed, `{"reward":null}`: ReasonMalformed,
		`{"reward":[1]}`: ReasonMalformed, `{"a":1}`: ReasonMalformed, `[1]`: ReasonMalformed, `1`: ReasonMalformed, `{"reward":1}{}`: ReasonMalformed,
		`{"reward":0,"reward":1}`: ReasonMalformed, `{"reward":1`: ReasonMalformed, `{"reward":1,}`: ReasonMalformed, `{"Reward":1}`: ReasonMalformed,
		`{"reward":1,"b":1e999}`: ReasonNotFinite, `{"reward":1.0000001}`: ReasonOutOfRange, `{"reward":-0.1}`: ReasonOutOfRange,
	} {
		_, _, err := parseRewardJSON([]byte(text))
		if got, _ := reasonOf(err); got != want {
			t.Errorf("%s: got %q (%v), want %q", text, got, err, want)
		}
	}
}

func TestRewardText(t *testing.T) {
	for text, want := range map[string]Reason{
		"1": "", "0.0\n": "", "\t.5": "", "1e-3": "", "-0": "",
		"": ReasonEmpty, "nan": ReasonNotFinite, "-INF": ReasonNotFinite, "infinity": ReasonNotFinite, "1e999": ReasonNotFinite,
		"1 0": ReasonMalformed, "0x1p-1": ReasonMalformed, "1_0": ReasonMalformed, "1,0": ReasonMalformed, "one": ReasonMalformed, "e": ReasonMalformed,
		"2": ReasonOutOfRange, "-1": ReasonOutOfRange,
	} {
		_, err := parseRewardText([]byte(text))
		if got, _ := reasonOf(err); got != want {
			t.Errorf("%q: got %q (%v), want %q", text, got, err, want)
		}
	}
}

func TestReport(t *testing.T) {
	cases := []struct {
		text   string
		counts report
		reason Reason
	}{
		{`<?xml version="1.0"?><testsuites><testsuite><testcase name="a"/><testcase><system-out>failure</system-out></testcase></testsuite></testsuites>`, report{passed: 2}, ""},
		{`<testsuite><testcase><failure message="no">x</failure></testcase><testcase><error/></testcase><testcase><skipped/></testcase></testsuite>`, report{failed: 2, skipped: 1}, ""},
		{`<testsuite><error>collection failed</error><testcase/></testsuite>`, report{passed: 1, failed: 1}, ""},
		{`<testsuite><testcase><a><failure/></a></testcase></testsuite>`, report{passed: 1}, ""},
		{``, report{}, ReasonEmpty},
		{`<html/>`, report{}, ReasonMalformed},
		{`<testsuite>`, report{}, ReasonMalformed},
		{`<testsuite>&boom;</testsuite>`, report{}, ReasonMalformed},
		{strings.Repeat("<testsuite>", 100), report{}, ReasonMalformed},
	}
	for _, c := range cases {
		counts, err := parseReport(strings.NewReader(c.text))
		if got, _ := reasonOf(err); got != c.reason || err == nil && counts != c.counts {
			t.Errorf("%.60s: got %+v, %v", c.text, counts, err)
		}
	}
}

func FuzzReward(f *testing.F) {
	f.Add([]byte(`{"reward": 0.5, "other": 1}`))
	f.Add([]byte("1.0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := parseRewardText(b)
		m, all, jsonErr := parseRewardJSON(b)
		for _, v := range []struct {
			n   float64
			err error
		}{{n, err}, {m, jsonErr}} {
			if v.err == nil && !(v.n >= 0 && v.n <= 1) {
				t.Errorf("%q is %v", b, v.n)
			}
		}
		for _, v := range all {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Errorf("%q has %v", b, v)
			}
		}
	})
}

func FuzzReport(f *testing.F) {
	f.Add([]byte(`<testsuite><testcase/><testcase><failure/></testcase></testsuite>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		counts, err := parseReport(bytes.NewReader(b))
		if n, rewardErr := counts.reward(); err == nil && rewardErr == nil && (n == 1) != (counts.failed == 0) {
			t.Errorf("%+v is %v", counts, n)
		}
	})
}

func TestOutputIsKeptToALimit(t *testing.T) {
	c := newCapture()
	for range 100 {
		c.Write(bytes.Repeat([]byte("0123456789abcdef"), 256))
	}
	c.Write([]byte("end\xff"))
	o := c.output(5)
	if o.Bytes != 100*4096+4 || o.Dropped != 5 || !o.Truncated || !strings.HasSuffix(o.Tail, "end\uFFFD") || len(o.Tail) > tailLimit+2 || len(o.SHA256) != 64 {
		t.Errorf("got %d bytes, tail of %d, truncated %v", o.Bytes, len(o.Tail), o.Truncated)
	}
	c = newCapture()
	c.Write([]byte("x"))
	if o := c.output(0); o.Truncated || o.Tail != "x" {
		t.Errorf("got %+v", o)
	}
}
