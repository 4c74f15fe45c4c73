package judge

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
)

// Agreement says how far several verdicts on the same rollout agree.
type Agreement struct {
	// Agreed: all are of one outcome, and if that is "scored", of one reward.
	Agreed bool `json:"agreed"`
	Count  int  `json:"count"`
	// Outcomes counts each that there was.
	Outcomes map[Outcome]int `json:"outcomes"`
	// Rewards are the different ones, in ascending order.
	Rewards []float64 `json:"rewards"`
	// Mean is of the rewards of all that were scored, null if none was.
	Mean *float64 `json:"mean"`
}

// Agree compares verdicts.
func Agree(verdicts []*Verdict) Agreement {
	a := Agreement{Count: len(verdicts), Outcomes: map[Outcome]int{}, Rewards: []float64{}}
	sum := 0.0
	for _, v := range verdicts {
		a.Outcomes[v.Outcome]++
		if v.Reward == nil {
			continue
		}
		sum += *v.Reward
		if !slices.ContainsFunc(a.Rewards, func(have float64) bool { return sameNumber(have, *v.Reward) }) {
			a.Rewards = append(a.Rewards, *v.Reward)
		}
	}
	slices.Sort(a.Rewards)
	if n := a.Outcomes[Scored]; n > 0 {
		mean := sum / float64(n)
		a.Mean = &mean
	}
	a.Agreed = len(a.Outcomes) == 1 && len(a.Rewards) <= 1
	return a
}

// parallel is how many verdicts are sought at the same time: each has two machines.
const parallel = 8

// Repeat calls judge so many times, several at once. It returns all verdicts, or the
// error of the first call that has none. Where each call tells of its verdict before it
// returns, as Request.Decided does, decided hears of all of them as soon as there are so
// many; it may be nil.
func Repeat(ctx context.Context, count int, decided func([]*Verdict), judge func(ctx context.Context, decided func(*Verdict)) (*Verdict, error)) ([]*Verdict, error) {
	verdicts, early, errs := make([]*Verdict, count), make([]*Verdict, count), make([]error, count)
	turns := make(chan struct{}, parallel)
	var undecided atomic.Int64
	undecided.Store(int64(count))
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			verdicts[i], errs[i] = judge(ctx, func(v *Verdict) {
				early[i] = v
				if undecided.Add(-1) == 0 && decided != nil {
					decided(early)
				}
			})
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return verdicts, nil
}
