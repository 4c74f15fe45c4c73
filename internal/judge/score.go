package judge

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

const (
	maxReward = 64 << 10 // bytes of a reward file
	maxReport = 16 << 20 // bytes of a JUnit report
)

// unfit says why bytes are no verdict.
type unfit struct {
	reason Reason
	detail string
}

func (e *unfit) Error() string { return e.detail }

func unfitf(reason Reason, format string, a ...any) error {
	return &unfit{reason, fmt.Sprintf(format, a...)}
}

// parseRewardJSON reads a flat object of numbers, of which "reward" is the score.
func parseRewardJSON(b []byte) (float64, map[string]float64, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return 0, nil, unfitf(ReasonEmpty, "reward.json is empty")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return 0, nil, unfitf(ReasonMalformed, "reward.json is no object")
	}
	rewards := map[string]float64{}
	for d.More() {
		name, n, err := member(d)
		if err != nil {
			return 0, nil, err
		}
		if _, twice := rewards[name]; twice {
			return 0, nil, unfitf(ReasonMalformed, "reward.json has %.80q twice", name)
		}
		rewards[name] = n
	}
	if _, err := d.Token(); err != nil {
		return 0, nil, unfitf(ReasonMalformed, "reward.json is cut off")
	}
	if _, err := d.Token(); err != io.EOF {
		return 0, nil, unfitf(ReasonMalformed, "reward.json goes on after its object")
	}
	reward, ok := rewards["reward"]
	if !ok {
		return 0, nil, unfitf(ReasonMalformed, "reward.json has no reward")
	}
	return reward, rewards, inRange(reward)
}

// member reads a name and a number.
func member(d *json.Decoder) (string, float64, error) {
	key, err := d.Token()
	name, isText := key.(string)
	if err != nil || !isText {
		return "", 0, unfitf(ReasonMalformed, "reward.json: %v", err)
	}
	value, err := d.Token()
	if err != nil {
		return "", 0, unfitf(ReasonMalformed, "reward.json: %v", err)
	}
	number, isNumber := value.(json.Number)
	if !isNumber {
		return "", 0, unfitf(ReasonMalformed, "reward.json: %.80q is no number", name)
	}
	n, err := number.Float64()
	if err != nil || math.IsInf(n, 0) {
		return "", 0, unfitf(ReasonNotFinite, "reward.json: %.80q is %.40s", name, number)
	}
	return name, n, nil
}

// parseRewardText reads one number.
func parseRewardText(b []byte) (float64, error) {
	text := strings.TrimSpace(string(b))
	if text == "" {
		return 0, unfitf(ReasonEmpty, "reward.txt is empty")
	}
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case math.IsNaN(n) || math.IsInf(n, 0):
		return 0, unfitf(ReasonNotFinite, "reward.txt is %.40q", text)
	case err != nil || strings.Trim(text, "0123456789+-.eE") != "":
		return 0, unfitf(ReasonMalformed, "reward.txt is %.40q", text)
	}
	return n, inRange(n)
}

// inRange refuses what is no share of the whole: a number that means something else
// than it seems to must not be trained on.
func inRange(n float64) error {
	if math.IsNaN(n) || math.IsInf(n, 0) {
		return unfitf(ReasonNotFinite, "reward is %v", n)
	}
	if n < 0 || n > 1 {
		return unfitf(ReasonOutOfRange, "reward is %v, not from 0 to 1", n)
	}
	return nil
}

// report counts the test cases of a JUnit report.
type report struct{ passed, failed, skipped int }

// reward is 1 if tests have run and none has failed.
func (r report) reward() (float64, error) {
	switch {
	case r.passed+r.failed == 0:
		return 0, unfitf(ReasonEmpty, "no test of the report has run")
	case r.failed > 0:
		return 0, nil
	}
	return 1, nil
}

// maxDepth is more than any report is nested.
const maxDepth = 64

// parseReport reads a JUnit report: elements testcase, in which failure, error and
// skipped say how it went.
func parseReport(r io.Reader) (report, error) {
	var counts report
	d := xml.NewDecoder(r)
	d.Entity = map[string]string{}
	depth, within, elements := 0, 0, 0 // within: the depth of the test case, 0 outside
	failed, skipped := false, false
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			return counts, unfitf(ReasonMalformed, "report: %v", err)
		}
		switch t := token.(type) {
		case xml.StartElement:
			elements++
			if depth++; depth > maxDepth {
				return counts, unfitf(ReasonMalformed, "report: nested too deeply")
			}
			switch name := t.Name.Local; {
			case elements == 1 && name != "testsuites" && name != "testsuite":
				return counts, unfitf(ReasonMalformed, "report begins with %.40q, not with testsuites", name)
			case name == "testcase" && within == 0:
				within, failed, skipped = depth, false, false
			case depth == within+1 && within > 0:
				failed = failed || name == "failure" || name == "error"
				skipped = skipped || name == "skipped"
			case name == "error" && within == 0: // of a suite, which could not be set up
				counts.failed++
			}
		case xml.EndElement:
			if depth == within && within > 0 {
				within = 0
				switch {
				case failed:
					counts.failed++
				case skipped:
					counts.skipped++
				default:
					counts.passed++
				}
			}
			depth--
		}
	}
	if elements == 0 {
		return counts, unfitf(ReasonEmpty, "report is empty")
	}
	return counts, nil
}

// reasonOf is the reason of an unfit verdict.
func reasonOf(err error) (Reason, bool) {
	var u *unfit
	if errors.As(err, &u) {
		return u.reason, true
	}
	return "", false
}
