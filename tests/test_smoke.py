import torch

import cloudckpt


def test_a_state_dict_comes_back_from_s3(bucket, s3_config):
    saved = {"w": torch.randn(100, 30), "step": 7}
    uri = f"s3://{bucket}/run/step-7"
    cloudckpt.save(saved, checkpoint_id=uri, config=s3_config)
    loaded = {"w": torch.zeros(100, 30), "step": 0}
    cloudckpt.load(loaded, checkpoint_id=uri, config=s3_config)
    assert torch.equal(loaded["w"], saved["w"])
    assert loaded["step"] == 7
