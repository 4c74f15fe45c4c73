package judge

import "strconv"

// Summary is a result in a few words.
func (r *Result) Summary() string {
	return summarize(r.Outcome, r.Reward, r.Reason)
}

// Summary is a verdict in a few words.
func (v *Verdict) Summary() string {
	return summarize(v.Outcome, v.Reward, v.Reason)
}

func summarize(o Outcome, reward *float64, reason Reason) string {
	switch {
	case reward != nil:
		return string(o) + " " + strconv.FormatFloat(*reward, 'g', -1, 64)
	case reason != "":
		return string(o) + " (" + string(reason) + ")"
	}
	return string(o)
}
